"""What does the package do on a real GPU, and do its predictions hold there? See README.md in this
folder.
"""
