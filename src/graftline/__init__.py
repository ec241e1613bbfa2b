"""Graftline: prefill and decode on separate services, with a real draft tree handed over.

The folders at the top of the repository appear here as sub-packages through symbolic links;
docs/architecture.md says who may import whom.
"""

__version__ = "0.1.0"
