"""Plans and profiles as tables."""
