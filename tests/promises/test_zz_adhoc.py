from tests.promises.test_plans import *
def test_x(run_ranks):
    for s in ("zero3_nvme", "zero3_nvme+params_as=int8+grads_as=int8", "zero3_nvme+grads_as=int8", "zero3_nvme+params_as=int8"):
        training, choice = choice_of("bf16", 1)
        found = asked(assessor(IN_TREE, training), s, choice)
        print(s, {way: getattr(found.moved, way) for way in WAYS})
        for k in range(2):
            for rank in run_ranks(WORLD, run_each, IN_TREE, [s], "bf16", 1):
                print("   ", dict(rank[0].traffic.moves))
