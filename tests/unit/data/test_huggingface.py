"""Hugging Face datasets and partitioners of flwr-datasets.

The tests run on datasets that have the interface of the package `datasets`, and again on the
package itself where it is installed.
"""

from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image as PillowImage

import fedensemble as fe
from fedensemble.data import partition, read_huggingface
from fedensemble.errors import DataError, InputError

RNG = np.random.default_rng(0)


# The part of the interface that versions 4 and 5 of `datasets` share: `features` by column, and
# slices that are dicts of columns.
class Value:
    def __init__(self, dtype):
        self.dtype = dtype


class ClassLabel:
    def __init__(self, names):
        self.names = names


class Image:
    pass


class Audio:
    pass


class Array2D:
    def __init__(self, shape, dtype):
        self.shape, self.dtype = shape, dtype


class FakeDataset:
    def __init__(self, columns, features, kind=None, transform=None):
        self.columns, self.features = columns, features
        self.format = {"type": kind}
        self.transform = transform

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def select_columns(self, names):
        return FakeDataset({n: self.columns[n] for n in names},
                           {n: self.features[n] for n in names}, self.format["type"],
                           self.transform)  # fmt: skip

    def select(self, rows):
        return FakeDataset({n: [v[r] for r in rows] for n, v in self.columns.items()},
                           self.features, self.format["type"], self.transform)  # fmt: skip

    def with_format(self, kind):
        return FakeDataset(self.columns, self.features, kind)

    def with_transform(self, transform):
        return FakeDataset(self.columns, self.features, "custom", transform)

    def __getitem__(self, rows):
        assert isinstance(rows, slice), "one row at a time is slow"
        part = {name: values[rows] for name, values in self.columns.items()}
        if self.format["type"] == "custom":
            return self.transform(part)
        if self.format["type"] != "numpy":
            return part
        arrays = {}
        for name, values in part.items():
            dtype = getattr(self.features[name], "dtype", None)
            kind = None if dtype in ("string", None) else dtype
            try:
                arrays[name] = np.array(values, kind)
            except (TypeError, ValueError):  # missing values, and arrays of different shapes
                arrays[name] = np.empty(len(values), object)
                arrays[name][:] = values
        return arrays


class Fakes:
    Value, ClassLabel, Image, Array2D, Audio = Value, ClassLabel, Image, Array2D, Audio

    @staticmethod
    def make(columns, features):
        return FakeDataset(columns, features)

    @staticmethod
    def splits(**parts):
        return parts


class Real:
    """The package `datasets`."""

    def __init__(self):
        import datasets

        self.Value, self.ClassLabel = datasets.Value, datasets.ClassLabel
        self.Image, self.Array2D, self.Audio = datasets.Image, datasets.Array2D, datasets.Audio
        self.datasets = datasets

    def make(self, columns, features):
        return self.datasets.Dataset.from_dict(columns, features=self.datasets.Features(features))

    def splits(self, **parts):
        return self.datasets.DatasetDict(parts)


@pytest.fixture(params=["fake", "real"])
def hf(request):
    if request.param == "fake":
        return Fakes()
    pytest.importorskip("datasets")
    return Real()


def pets(hf, rows=12, mode=None):
    """A dataset of images of three people, and the pixels [rows, channels, 5, 7]."""
    shape = (rows, 5, 7) if mode == "L" else (rows, 5, 7, 3)
    pixels = RNG.integers(0, 256, shape, dtype=np.uint8)
    columns = {
        "picture": [PillowImage.fromarray(each) for each in pixels],
        "kind": [row % 2 for row in range(rows)],
        "person": [("ann", "bob", "eve")[row % 3] for row in range(rows)],
    }
    features = {"picture": hf.Image(), "kind": hf.ClassLabel(names=["dog", "cat"]),
                "person": hf.Value("string")}  # fmt: skip
    x = pixels[:, None] if mode == "L" else pixels.transpose(0, 3, 1, 2)
    return hf.make(columns, features), x


def test_images_labels_and_clients(hf):
    dataset, pixels = pets(hf)
    data = fe.FederatedData.from_huggingface(dataset, x="picture", y="kind", client="person")
    assert data.names == ("ann", "bob", "eve") and data.size.tolist() == [4, 4, 4]
    assert data.class_names == ("dog", "cat") and data.x_test is None
    order = np.argsort(np.arange(12) % 3, kind="stable")
    assert np.array_equal(data.x.numpy(), pixels[order])
    assert data.y.tolist() == [row % 2 for row in order]
    flat = pixels.transpose(1, 0, 2, 3).reshape(3, -1)
    np.testing.assert_allclose(data.standardise.mean, flat.mean(1))
    np.testing.assert_allclose(data.standardise.std, flat.std(1))
    federation = fe.Federation("mlp", data, modes=2)
    federation.train(1)
    assert set(federation.predict(data.x).label_names) <= {"dog", "cat"}


def test_splits_are_training_and_test(hf):
    (train, _), (test, pixels) = pets(hf), pets(hf, 6)
    data = fe.FederatedData.from_huggingface(
        hf.splits(train=train, test=test), x="picture", y="kind", client="person"
    )
    assert np.array_equal(data.x_test.numpy(), pixels)
    assert data.test_owner.tolist() == [0, 1, 2, 0, 1, 2]
    same = read_huggingface(hf.splits(train=train, other=test), x="picture", y="kind", test="other")
    assert np.array_equal(same.x_test, pixels) and same.group is None
    only = read_huggingface(train, x="picture", y="kind", test=test)
    assert np.array_equal(only.y_test, [0, 1] * 3)
    assert len(partition(only, "dirichlet", 3)) == 3
    with pytest.raises(DataError, match="no split 'none', only 'train', 'test'"):
        read_huggingface(hf.splits(train=train, test=test), x="picture", y="kind", test="none")
    with pytest.raises(DataError, match="no split 'train', only 'all'"):
        read_huggingface(hf.splits(all=train), x="picture", y="kind")
    with pytest.raises(DataError, match="names a split, and this is one Dataset"):
        read_huggingface(train, x="picture", y="kind", test="test")


def test_gray_images_have_one_channel_unless_others_have_color(hf):
    gray, pixels = pets(hf, mode="L")
    assert np.array_equal(read_huggingface(gray, x="picture", y="kind").x, pixels)
    color, test = pets(hf, 3)
    both = read_huggingface(gray, x="picture", y="kind", test=color)
    assert np.array_equal(both.x, np.repeat(pixels, 3, 1)) and np.array_equal(both.x_test, test)
    one = read_huggingface(gray, x="picture", y="kind", test=color, color="gray")
    assert one.x.shape[1] == one.x_test.shape[1] == 1


def test_images_of_different_sizes(hf):
    images = [PillowImage.new("RGB", size) for size in [(4, 4), (4, 4), (6, 2)]]
    features = {"x": hf.Image(), "y": hf.Value("int64")}
    dataset = hf.make({"x": images, "y": [0, 1, 1]}, features)
    with pytest.raises(DataError, match=r"2 of 3 are 4x4, that of row 2 is 2x6. Set size = \[4, 4"):
        read_huggingface(dataset, x="x", y="y")
    assert read_huggingface(dataset, x="x", y="y", size=[3]).x.shape == (3, 3, 3, 3)
    missing = hf.make({"x": [images[0], None], "y": [0, 1]}, features)
    with pytest.raises(DataError, match="has no image in row 1"):
        read_huggingface(missing, x="x", y="y")


def test_columns_of_numbers(hf):
    values = RNG.normal(5, 3, (10, 2))
    columns = {"a": values[:, 0].tolist(), "b": values[:, 1].tolist(),
               "y": ["yes", "no"] * 5, "site": [30, 4] * 5}  # fmt: skip
    features = {"a": hf.Value("float32"), "b": hf.Value("float64"), "y": hf.Value("string"),
                "site": hf.Value("int64")}  # fmt: skip
    dataset = hf.make(columns, features)
    data = fe.FederatedData.from_huggingface(dataset, x=["a", "b"], y="y", client="site")
    assert data.feature_names == ("a", "b") and data.names == ("4", "30")
    assert data.class_names == ("no", "yes") and data.y.tolist() == [0] * 5 + [1] * 5
    np.testing.assert_allclose(data.x, values[[*range(1, 10, 2), *range(0, 10, 2)]], rtol=1e-6)
    np.testing.assert_allclose(data.standardise.mean, values.mean(0), rtol=1e-5)
    plain = read_huggingface(dataset, x="a", y="b", scale=False)
    assert plain.x.shape == (10, 1) and plain.classes is None and plain.standardise is None
    np.testing.assert_allclose(plain.y, values[:, 1])


def test_arrays_and_transforms(hf):
    values = RNG.normal(size=(6, 2, 3)).astype(np.float32)
    features = {"m": hf.Array2D((2, 3), "float32"), "y": hf.Value("int64")}
    dataset = hf.make({"m": values.tolist(), "y": [0, 1] * 3}, features)
    source = read_huggingface(dataset, x="m", y="y")
    assert np.array_equal(source.x, values) and source.x.dtype == np.float32
    doubled = dataset.with_transform(
        lambda rows: {n: [2 * np.asarray(v) for v in values] for n, values in rows.items()}
    )
    source = read_huggingface(doubled, x="m", y="y")
    assert np.array_equal(source.x, 2 * values) and source.y.tolist() == [0, 2] * 3


def test_a_class_of_a_single_client_is_noted(hf):
    columns = {"a": [0.0] * 4, "y": [0, 0, 1, 0], "who": [0, 1, 1, 1]}
    features = {"a": hf.Value("float32"), "y": hf.ClassLabel(names=["well", "ill"]),
                "who": hf.ClassLabel(names=["north", "south"])}  # fmt: skip
    data = fe.FederatedData.from_huggingface(
        hf.make(columns, features), x=["a"], y="y", client="who"
    )
    assert data.names == ("north", "south")
    assert "'ill' ('south')" in " ".join(data.notes)


class Slices:
    """A partitioner with the interface of flwr-datasets: every third row, from `index` on."""

    def __init__(self, dataset=None, count=3, natural=None):
        self.dataset, self.count = dataset, count
        if natural is not None:
            self.partition_id_to_natural_id = natural

    @property
    def num_partitions(self):
        return self.count

    def load_partition(self, partition_id):
        if self.dataset is None:
            raise AttributeError("The dataset field should be set before using it")
        return self.dataset.select(range(partition_id, len(self.dataset), self.count))


def test_partitions_are_clients(hf):
    dataset, pixels = pets(hf, 11)
    test, test_pixels = pets(hf, 3)
    data = fe.FederatedData.from_partitioner(Slices(dataset), x="picture", y="kind", test=test)
    assert data.size.tolist() == [4, 4, 3] and data.names == ("0", "1", "2")
    for client in range(3):
        x, y = data.client(client)
        assert np.array_equal(x.numpy(), pixels[client::3])
        assert y.tolist() == [row % 2 for row in range(11)][client::3]
    assert np.array_equal(data.x_test.numpy(), test_pixels) and data.class_names == ("dog", "cat")
    named = Slices(dataset, 2, {0: "x", 1: "y"})
    assert fe.FederatedData.from_partitioner(named, x="picture", y="kind").names == ("x", "y")


@pytest.mark.skipif(find_spec("flwr_datasets") is None, reason="needs flwr-datasets")
def test_the_partitioners_of_flower():
    from flwr_datasets import partitioner as p

    dataset, _ = pets(Real(), 60)
    for each in (
        p.IidPartitioner(4),
        p.DirichletPartitioner(3, "kind", 0.5, min_partition_size=2, seed=1),
        p.NaturalIdPartitioner("person"),
        p.LinearPartitioner(3),
    ):
        each.dataset = dataset
        data = fe.FederatedData.from_partitioner(each, x="picture", y="kind")
        assert data.size.tolist() == [len(each.load_partition(i)) for i in range(len(data))]
        assert len(data.x) == 60
    assert set(data.class_names) == {"dog", "cat"}
    with pytest.raises(DataError, match="The partitioner has no dataset"):
        fe.FederatedData.from_partitioner(p.IidPartitioner(4), x="picture", y="kind")
    natural = p.NaturalIdPartitioner("person")
    natural.dataset = dataset
    data = fe.FederatedData.from_partitioner(natural, x="picture", y="kind")
    assert sorted(data.names) == ["ann", "bob", "eve"]


def test_mistakes_say_what_to_do(hf):
    features = {"text": hf.Value("string"), "a": hf.Value("float32"), "y": hf.ClassLabel(names=["n", "p"]),
                "who": hf.Value("string")}  # fmt: skip
    columns = {"text": ["x", "yy"], "a": [1.0, 2.0], "y": [0, -1], "who": ["u", None]}
    dataset = hf.make(columns, features)
    for options, message in [
        ({"x": "text", "y": "a"}, "holds text, and inputs are numbers. Encode it"),
        ({"x": "b", "y": "a"}, r"unknown column 'b'"),
        ({"x": "a", "y": "y"}, r"1 rows have no label in column 'y' \(-1, .* dataset.filter"),
        ({"x": ["a", "text"], "y": "a"}, "column 'text' does not"),
        ({"x": "a", "y": "a", "client": "who"}, "'who' has no client in row 1"),
        ({"x": "a", "y": "a", "size": [0]}, "size to be an integer >= 1"),
    ]:
        with pytest.raises((DataError, InputError), match=message):
            read_huggingface(dataset, **options)
    with pytest.raises(DataError, match="Without such a column: partition"):
        fe.FederatedData.from_huggingface(dataset, x="a", y="y", client=None)
    with pytest.raises(InputError, match="unknown option of from_huggingface 'tests'"):
        fe.FederatedData.from_huggingface(dataset, x="a", y="a", client="who", tests=1)
    with pytest.raises(DataError, match=r"got list\. from_arrays"):
        read_huggingface([1, 2], x="a", y="y")
    with pytest.raises(DataError, match="partitioner of flwr-datasets is needed"):
        fe.FederatedData.from_partitioner(dataset, x="a", y="y")
    with pytest.raises(DataError, match=r"The partitioner has no dataset .* Set it"):
        fe.FederatedData.from_partitioner(Slices(), x="a", y="y")
    with pytest.raises(DataError, match=r"1 of 3 partitions have no rows \(first: partition 2"):
        fe.FederatedData.from_partitioner(Slices(dataset), x="a", y="a")
    with pytest.raises(DataError, match="holds Audio"):
        read_huggingface(FakeDataset({"x": [1], "y": [1]}, {"x": Audio(), "y": Value("int64")}),
                         x="x", y="y")  # fmt: skip


def test_streams_and_ragged_columns(hf):
    stream = SimpleNamespace(features={"a": Value("float32")}, select_columns=None)
    with pytest.raises(DataError, match=r"is streamed, .* Load it without streaming=True"):
        read_huggingface(stream, x="a", y="a")
    if isinstance(hf, Real):
        features = {"x": hf.datasets.Sequence(hf.Value("int64")), "y": hf.Value("int64")}
        ragged = hf.make({"x": [[1], [1, 2]], "y": [0, 1]}, features)
        with pytest.raises(DataError, match="is streamed"):
            read_huggingface(ragged.to_iterable_dataset(), x="x", y="y")
    else:
        ragged = FakeDataset({"x": [[1], [1, 2]], "y": [0, 1]},
                             {"x": Value("int64"), "y": Value("int64")})  # fmt: skip
    with pytest.raises(DataError, match="holds arrays of different shapes"):
        read_huggingface(ragged, x="x", y="y")
