from planner.selftest.rows import Check
CHECK = Check("memory", "", lambda lab: iter(()))
