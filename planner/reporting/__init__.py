"""Plans, profiles and runs for people: terminal tables, an HTML page, SVG charts."""
