"""Runs programs that nobody has read, in processes that reach nothing of this one's.

`choice` finds the strongest layer that works on this machine by trying to break out of it; `sandbox` starts and supervises
processes under it. The modules `entry`, `landlock`, `namespaces`, `privileges`, `system_calls` and `escapes` run inside: they
import the standard library alone.
"""
