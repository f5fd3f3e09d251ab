"""How accurate are predictions for compiled stages?"""
