"""The numbers of a run: recorded where they arise, reduced inside a replica, written to files, and shown."""
