"""`python -m graftline`."""

from graftline.cli import main

if __name__ == "__main__":
    main()
