"""Plans, profiles and runs for people: terminal tables, and an HTML page."""
