"""result.<rank>.json: what a worker says at its end, schema 1.

    schema           1
    status           ok | unsupported | diverged | invalid | device_oom | host_oom | failed
    phase            where it ended (import, build, first_step, iteration, block, train, evaluate, done)
    message, hint    one line each, empty when ok
    error_type       class of the exception, empty when ok
    versions         {"framework": …, "python": …, "numpy": …}
    effective        settings read back from the framework
    deviations       where the network differs from the spec, as the adapter declares it: `name: words; …`
    phases           {"import_s", "build_s", "first_step_s", "warmup_s"} in seconds, those reached
    steady           {"start": first steady row of the iteration pass or null, "found": bool, "reason": …}
    ci_missed        true when the budget ended before the interval was narrow enough
    readback         [fraction of the block's time that the host read-back after its sync took, …]
    wall_s           wall time of the iteration pass by another clock (time.monotonic), sanity for the rows
    parameters_changed  bool (null for tasks gradient and forward)
    peak_memory_mb   the framework's own peak, or null
    threads          {"cpu_s": CPU seconds of the process over the block pass, "wall_s": its wall time,
                     "busy": threads that worked more than 10 % of it}
    epochs           [{"epoch", "loss", "accuracy", "train_s", "test_loss", "test_accuracy"}, …]
    time_to_accuracy_s  training seconds until the target was reached, or null
    samples_seen     samples trained in the train phase
"""

import json
import os

SCHEMA = 1


def write(folder, rank, result):
    """Write result.<rank>.json so that a reader sees all of it or nothing."""
    path = os.path.join(folder, "result.%d.json" % rank)
    temporary = path + ".tmp"
    with open(temporary, "w") as out:
        json.dump(result, out, indent=1, sort_keys=True)
        out.write("\n")
        out.flush()
        os.fsync(out.fileno())
    os.rename(temporary, path)
