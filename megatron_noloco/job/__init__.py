"""How this process was launched, joins the others, is stopped, and leaves. All knowledge of launchers is here."""
