"""The command `longshore`: its arguments, its verbs, what they print and how they end."""
