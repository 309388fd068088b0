import json

import pytest
import torch

from trueup.errors import TransportFault
from trueup.sync.manifest import (
    count_changed,
    describe,
    manifest_as_dict,
    manifest_from_dict,
    verify,
)
from trueup.types import TensorEntry, WeightManifest


def manifest_of(tensors: dict[str, torch.Tensor]) -> WeightManifest:
    return describe(3, tensors, {}, transport="t", location="here")


def test_a_manifest_survives_json() -> None:
    manifest = manifest_of({"a": torch.ones(2, 3), "b": torch.tensor(1, dtype=torch.int8)})
    assert manifest_from_dict(json.loads(json.dumps(manifest_as_dict(manifest)))) == manifest


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: record.pop("digest"),
        lambda record: record.update(colour="red"),
        lambda record: record.update(tensors=None),
        lambda record: record["tensors"][0].pop("shape"),
    ],
)
def test_an_incomplete_manifest_is_refused(damage) -> None:
    record = manifest_as_dict(manifest_of({"a": torch.ones(2)}))
    damage(record)
    with pytest.raises(TransportFault, match="complete weight manifest"):
        manifest_from_dict(record)


def test_a_manifest_says_what_the_version_consists_of() -> None:
    manifest = manifest_of({"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)})
    zero = "0" * 16
    assert manifest == WeightManifest(
        version=3,
        transport="t",
        location="here",
        digest=zero,
        tensors=(
            TensorEntry(name="a", dtype="float32", shape=(2, 3), digest=zero),
            TensorEntry(name="b", dtype="bfloat16", shape=(4,), digest=zero),
        ),
        nbytes=32,
        n_changed=10,
    )


def test_a_total_that_is_not_the_sum_is_refused() -> None:
    tensors = {"a": torch.ones(2)}
    record = manifest_as_dict(manifest_of(tensors)) | {"digest": "0" * 16}
    with pytest.raises(TransportFault, match="all tensors must be of digest 0000000000000000"):
        verify(manifest_from_dict(record), tensors)


def test_a_name_that_is_listed_twice_is_refused() -> None:
    tensors = {"a": torch.ones(2)}
    record = manifest_as_dict(manifest_of(tensors))
    record["tensors"] *= 2
    with pytest.raises(TransportFault, match="named once each"):
        verify(manifest_from_dict(record), tensors)


def test_changes_are_counted_in_elements_and_by_bits() -> None:
    before = torch.tensor([0.0, 1.0, float("nan"), 4.0], dtype=torch.float64)
    after = torch.tensor([-0.0, 1.0, float("nan"), 5.0], dtype=torch.float64)
    assert count_changed(after, before) == 2
    assert count_changed(after, after.clone()) == 0
    assert count_changed(after, None) == 4
    assert count_changed(after, before.to(torch.float32)) == 4
    assert count_changed(after.reshape(2, 2), before) == 4
    assert count_changed(torch.empty(0), torch.empty(0)) == 0
