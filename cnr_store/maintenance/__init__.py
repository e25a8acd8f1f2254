"""Keep a store fast, small and sound: compaction, garbage collection, verification, repair, status.

Never changes a value that a version reads as. Open `maintain` first (one run of everything), then the
package of the job.
"""
