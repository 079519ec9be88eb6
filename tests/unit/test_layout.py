"""The unit tests mirror the package: each module has its file here, and each file its module."""

from pathlib import Path

import torchgpipe

UNIT = Path(__file__).parent
TESTS = UNIT.parent
PACKAGE = Path(torchgpipe.__file__).parent

#: About the package as a whole.
OF_ALL = {
    "test_contexts",
    "test_documents",
    "test_layout",
    "test_prose",
    "test_reference",
    "test_rooms",
}

#: Modules, or whole rooms, that are tested elsewhere: where, below tests.
ELSEWHERE = {
    "ambient/labels": "virtual/test_labels.py",
    "engine/body": "behaviour/test_in_place.py",
    "engine/cell": "virtual/test_limit.py",
    "engine/links": "virtual/test_schedule_races.py",
    "engine/unchanged": "unit/planner/test_blocks.py",
    "engine/step": "unit/engine/test_pipeline.py",
    "mapped/glue": "virtual/test_mapped_code.py",
    "mapped/inputs": "unit/test_mapped_gpipe.py",
    "mapped/slice_attention": "virtual/test_slices_attention.py",
    "mapped/slice_cache": "virtual/test_slices.py",
    "mapped/slice_outputs": "virtual/test_slices.py",
    "mapped/slice_proof": "virtual/test_slices.py",
    "mapped/slice_refusals": "virtual/test_slices_arguments.py",
    "mapped/sliced_call": "virtual/test_slices.py",
    "planner/advice": "virtual/test_advice.py",
    "planner/observed": "virtual/test_advice_strays.py",
    "planner/problem": "virtual/test_plans.py",
    "show/figures": "unit/show/test_describe.py",
    "recompute/offload": "virtual/test_offload.py",
    "recompute/selective": "virtual/test_selective.py",
    "recompute/storage": "virtual/test_offload.py",
    "ambient/modes": "behaviour/test_autocast.py",
    "engine/scheduled_cell": "behaviour/test_schedules.py",
    "engine/computation": "virtual/test_schedules.py",
    "distributed": "distributed",
    "_torch/pipelining": "distributed/test_canaries.py",
    "graphs/cell": "behaviour/test_graph_stages.py",
    "engine/loop": "virtual/test_schedules.py",
    "mapped/body": "unit/test_mapped_gpipe.py",
    "mapped/calls": "virtual/test_mapped_unwrapped.py",
    "mapped/foreign": "virtual/test_mapped_foreign.py",
    "_torch/checkpoints": "virtual/test_mapped_lent.py",
    "mapped/cell": "virtual/test_mapped.py",
    "mapped/course": "virtual/test_mapped_course.py",
    "mapped/step": "virtual/test_mapped.py",
    "devices/recorder": "unit/balance/test_profile.py",
    "engine/stages": "unit/engine/test_lanes.py",
    "schedule": "schedule",
    "skip/layout": "unit/test_stream.py",
    "testing/busy": "virtual/test_observe.py",
    "testing/device_module": "virtual/test_device.py",
    "testing/dry_run/__main__": "virtual/test_dry_run_script.py",
    "testing/measure": "virtual/test_measure.py",
    "testing/report": "virtual/test_labels.py",
    "testing/observe": "virtual/test_observe.py",
    "planner/search": "virtual/test_plans.py",
    "planner/trial": "virtual/test_plan_memory.py",
    "plans": "virtual/test_plans.py",
    "transformers/children": "unit/transformers/test_proof.py",
    "transformers/fused_head": "virtual/test_trl.py",
    "transformers/spread": "virtual/test_spread_trainer.py",
    "transformers/spread_trainer": "virtual/test_spread_trainer.py",
    "transformers/stand_in": "virtual/test_spread_trainer.py",
    "transformers/idleness": "virtual/test_spread_trainer.py",
    "engine/recorded": "virtual/test_tracing.py",
    "tracing": "virtual/test_tracing.py",
}

#: Modules as "room/name"; a package itself has the name of its room.
MODULES = {
    str(path.relative_to(PACKAGE).with_suffix(""))
    for path in PACKAGE.rglob("*.py")
    if path.name != "__init__.py"
}
ROOMS = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}

#: Files of tests, by what their names say that they are about.
FILES = {
    str(path.relative_to(UNIT).with_name(path.stem.removeprefix("test_"))): path
    for path in UNIT.rglob("test_*.py")
    if path.parent != UNIT or path.stem not in OF_ALL
}


def module_of(name):
    """The module whose name a file has, with or without a suffix, or None."""
    room, _, end = name.rpartition("/")
    if room == end and room in ROOMS:
        return name
    words = end.split("_")
    names = ["/".join(filter(None, (room, "_".join(words[:k])))) for k in range(len(words), 0, -1)]
    return next((x for x in names if x in MODULES), None)


def listed(module):
    return module if module in ELSEWHERE else module.partition("/")[0]


def test_every_file_has_a_module():
    assert [name for name in FILES if module_of(name) is None] == []


def test_every_module_has_one_of_a_file_and_an_entry():
    tested = {*map(module_of, FILES)}
    assert [x for x in MODULES if (x in tested) == (listed(x) in ELSEWHERE)] == []


def test_what_is_listed_is_there():
    assert {*ELSEWHERE} <= MODULES | ROOMS
    assert [x for x in ELSEWHERE.values() if not (TESTS / x).exists()] == []
