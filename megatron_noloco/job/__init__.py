"""Start, join, agree, stop, fail: the life of a job's process. All knowledge of launchers is here."""
