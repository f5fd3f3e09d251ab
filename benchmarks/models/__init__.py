"""Any model: captured, cut, and its times against the whole step."""
