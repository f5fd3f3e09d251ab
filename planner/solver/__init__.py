"""Profile + Cluster -> Plan."""
