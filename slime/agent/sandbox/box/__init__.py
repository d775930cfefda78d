"""The program that holds one box: namespaces, its root, and the loop that starts processes in it.

It runs as its own interpreter (`python -I -S`), loaded under the name `slime_box` so that nothing else of the
package is imported: it may use the standard library only, and everything is imported before the root changes.
"""
