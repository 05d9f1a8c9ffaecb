"""Job: how this process was launched, joins the others, is stopped, and leaves."""
