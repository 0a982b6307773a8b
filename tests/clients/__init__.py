"""Programs and tests of others, by blinkmpi and by what they use otherwise: ``make clients``."""
