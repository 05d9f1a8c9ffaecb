"""The one command line. Importing it is quick: what takes seconds is imported by the command that needs it."""
