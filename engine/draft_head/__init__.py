"""The draft head as a file format, and the tool that trains and measures one. The serving side is `engine.drafter`."""
