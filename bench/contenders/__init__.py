"""The contenders: one module each, run as `python -m bench.contenders.NAME SPEC.json` in a process of its own.

A contender's module imports nothing heavy at its top (the driver reads its constants) and has

    TITLE     for the table: "Run:ai streamer, S3"
    CHECKS    does it compare every byte with a digest? CHECKS = False
    KEEPS     are the tensors in memory of the program's own at the end, as they would be used? KEEPS = True
    SOURCES   which of "http", "https", "file" it reads; left out: ("http",)
    SETTINGS  list of option dicts to try before the rounds; the first is taken when nothing is tried: [{"threads": 8}]
    CASES     optional: modes of the same program, a tuple of bench.contender.Case; each gets a line of its own
    main(spec)

and ends with

    if __name__ == "__main__":
        run_contender(main)

`main` imports what it needs, gets ready (clients made, connections not yet used for weights), wraps what is timed in
`with measured(spec) as m:` and returns. Everything that the tensors need to stay alive stays alive to the end of that
block, which looks at memory a last time there. Not installed or not able to run here: raise NotRunnable (a module
that is not found is taken for it), which is exit code 3 and the reason on stderr.
"""
