"""x"""
def register(): pass
