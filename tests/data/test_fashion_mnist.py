"""The data module on a tiny dataset in the real format; batches are augmented as single samples.

Files are found, fetched and checked; damaged and half written ones are replaced.
"""

import gzip
import hashlib

import pytest
import torch
from torchvision.datasets import FashionMNIST as FashionMNISTFiles

from lightning_mgpu.data import FashionMNIST, sources
from lightning_mgpu.data.fashion_mnist import MEAN, STD
from lightning_mgpu.data.images import InMemoryImages, augment
from lightning_mgpu.data.sources import FILES, SYSTEM_DIR, ensure_fashion_mnist

IMAGES = torch.randint(0, 256, (40, 1, 28, 28), dtype=torch.uint8)


def test_serves_what_torchvision_reads(root, make_data):
    theirs = FashionMNISTFiles(root, train=False)
    data = make_data(augment=True, crop_padding=1, normalize=True)
    assert data.train_set.crop_padding == 1 and data.val_set.crop_padding is None
    X, y = map(torch.cat, zip(*data.test_dataloader()))
    assert X.dtype == torch.float32 and y.dtype == torch.int64 and torch.equal(y, theirs.targets)
    torch.testing.assert_close(X, (theirs.data[:, None] / 255 - MEAN) / STD)
    assert data.summary.startswith("402 train, 101 val, 107 test; files ")


@pytest.mark.skipif(not SYSTEM_DIR.exists(), reason="needs the package dataset-fashion-mnist")
def test_the_real_files(tmp_path):
    assert ensure_fashion_mnist(tmp_path) == f"files under {SYSTEM_DIR}"
    sizes = [(tmp_path / "FashionMNIST" / "raw" / name).stat().st_size for name in FILES]
    assert sizes == [47_040_016, 60_008, 7_840_016, 10_008]


def test_validation_is_split_off_by_the_seed(make_data):
    def pictures(images):
        return {image.numpy().tobytes() for image in images.images}

    data, whole = make_data(seed=3), make_data(val_size=0)
    parts = [pictures(images) for images in (data.train_set, data.val_set, data.test_set)]
    assert [len(part) for part in parts] == [402, 101, 107] and len(set.union(*parts)) == 610
    assert parts[1] == pictures(make_data(seed=3).val_set) != pictures(make_data(seed=4).val_set)
    assert pictures(whole.train_set) == parts[0] | parts[1] and whole.val_set is whole.test_set


def test_options(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "17")
    assert FashionMNIST().seed == 17 and FashionMNIST(seed=2).seed == 2
    with pytest.raises(ValueError, match="val_size=-1, crop_padding=2: must be non-neg"):
        FashionMNIST(val_size=-1)
    with pytest.raises(ValueError, match="val_size=60000: must be less than 60000"):
        FashionMNIST(source="synthetic", val_size=60_000).setup("fit")
    data = FashionMNIST(source="synthetic", val_size=0)
    with pytest.warns(UserWarning, match="random images; the accuracy is meaningless"):
        data.prepare_data()
    data.setup("fit")
    assert data.summary.startswith("60,000 train, 10,000 val, 10,000 test; SYNTHETIC images")


@pytest.mark.parametrize("channels", [1, 3])
def test_augmenting_a_batch_equals_sample_by_sample(channels):
    X, uniforms = IMAGES.expand(-1, channels, -1, -1).clone(), torch.rand(40, 3)
    X[:, -1] //= 2  # channels differ

    found = augment(X, uniforms, padding=2)
    for i, image in enumerate(torch.nn.functional.pad(X, [2] * 4)):
        top, left = (int(number * 5) for number in uniforms[i, :2])
        window = image[:, top : top + 28, left : left + 28]
        assert torch.equal(found[i], window.flip(2) if uniforms[i, 2] < 0.5 else window)


def test_augmentation_depends_only_on_seed_epoch_and_sample():
    def batch(seed=1, epoch=5, step=1):
        images = InMemoryImages(IMAGES, torch.zeros(40), crop_padding=2, seed=seed)
        return images.read(epoch, torch.arange(0, 40, step))[0]

    whole = batch()
    assert torch.equal(batch(step=3), whole[::3])  # whatever the batch
    assert not torch.equal(batch(epoch=6), whole) and not torch.equal(batch(seed=2), whole)


CONTENT = {name: bytes(100 + i) for i, name in enumerate(FILES)}
TINY = {name: hashlib.md5(content).hexdigest() for name, content in CONTENT.items()}
FIRST = next(iter(FILES))


@pytest.fixture
def system_dir(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "SYSTEM_DIR", tmp_path / "system")
    monkeypatch.setattr(sources, "FETCH", "echo E: no archive >&2; exit 100")
    monkeypatch.setattr(FashionMNISTFiles, "mirrors", ["http://127.0.0.1:9/"])  # refuses at once
    (tmp_path / "system").mkdir()
    for name, content in CONTENT.items():
        (tmp_path / "system" / f"{name}.gz").write_bytes(gzip.compress(content))
    return tmp_path / "system"


def test_damaged_files_are_replaced_and_good_ones_are_kept(tmp_path, system_dir):
    raw = tmp_path / "FashionMNIST" / "raw"
    for damaged in (b"", CONTENT[FIRST][:50], CONTENT[FIRST][:-1] + b"\1"):
        assert ensure_fashion_mnist(tmp_path, TINY) == f"files under {system_dir}"
        assert {name: (raw / name).read_bytes() for name in FILES} == CONTENT
        assert ensure_fashion_mnist(tmp_path, TINY) == f"files under {raw}"
        (raw / FIRST).write_bytes(damaged)


def test_where_nothing_is_found_every_source_says_why(tmp_path, system_dir):
    (system_dir / f"{FIRST}.gz").write_bytes(gzip.compress(bytes(99) + b"\1"))
    with pytest.raises(RuntimeError) as caught:
        ensure_fashion_mnist(tmp_path, TINY)
    fix, *tried = str(caught.value).splitlines()
    assert "apt-get install dataset-fashion-mnist" in fix and "--data.source=synthetic" in fix
    reasons = ("No such file", f"{FIRST} is damaged", "Connection refused", "E: no archive")
    assert [reason in line for reason, line in zip(reasons, tried, strict=True)] == [True] * 4
    assert [path.name for path in (tmp_path / "FashionMNIST" / "raw").iterdir()] == [".lock"]
