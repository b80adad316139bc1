"""Ours at other writings of a head: times beside what counting predicts, by the package's own timer.

{"spec": {...}, "seconds": 0.5}     the fields of a `CostSpec`
{"fold": D_MODEL, "heads": H}       what folding makes of a stacked layer
"""

import torch

from benchmarks.workers.protocol import Answer, Options, Prepared, serve
from triptych import CostSpec, MultiHeadAttention, cost, measure_times
from triptych.core.attention import Stacked
from triptych.rewriting import rewrite


def prepare(options: Options) -> Prepared:
    """Nothing is built before a request."""
    torch.set_num_threads(options["threads"])

    def work(request: Options) -> Answer:
        if "fold" in request:
            layer = MultiHeadAttention(request["fold"], request["heads"], Stacked())
            return {"folded": rewrite(layer, "fold").result.parameterisation.name}
        given = {**request["spec"], "parameterisations": tuple(request["spec"]["parameterisations"])}
        report = cost(CostSpec(**given))
        times = measure_times(report, seconds=request["seconds"])
        return {"cost": report.figures(), "times": times.figures()}

    return {"threads": torch.get_num_threads()}, work


if __name__ == "__main__":
    serve(prepare)
