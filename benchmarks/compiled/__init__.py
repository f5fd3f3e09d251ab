"""How well are compiled stages predicted?"""
