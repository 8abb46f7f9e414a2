"""Runs contenders and shows what they measured. Read contender.py, then measure.py, rounds.py and report.py."""
