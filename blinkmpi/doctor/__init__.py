"""``blinkmpi doctor``: would a job run well here, and if not, what to do?"""
