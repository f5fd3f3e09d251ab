"""Check on any machine that planning and training work: `plan selftest`."""
