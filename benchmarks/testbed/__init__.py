"""Compare predictions with runs on emulated hosts (network namespaces) and emulated devices (that
sleep).
"""
