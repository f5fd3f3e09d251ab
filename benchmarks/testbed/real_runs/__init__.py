"""How far are predictions off, where two workers train on this machine's cores?"""
