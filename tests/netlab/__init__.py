"""A network lab: hosts with slow links between them, all on this machine."""
