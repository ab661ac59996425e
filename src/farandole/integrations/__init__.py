"""Interfaces of other frameworks over farandole. Each needs its framework, which is an extra."""
