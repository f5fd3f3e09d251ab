"""What the planner predicts, beside what runs on hosts that are namespaces and devices that sleep."""
