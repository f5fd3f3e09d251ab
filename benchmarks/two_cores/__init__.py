"""How fast are two processes on two cores, against one?"""
