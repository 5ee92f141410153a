"""`make gpu`: build for this machine's GPU, test, measure, and write the record.

    python -m benchmarks.gpu             # on a machine with an NVIDIA GPU
    python -m benchmarks.gpu --rehearse  # the same script on CPU tensors at tiny sizes; no timings

`__main__` runs the phases, each in processes of its own, so that a crash or a hang of one leaves
the others alone: `machine` (what is there), `building`, `tests/gpu`, and `measure` for the sections
`ceilings`, `layer`, `prefill` and `decode`. Rows come back as lines of JSON as they are measured;
`record` keeps them, `targets` holds them against what must be reached, `table` prints.
"""
