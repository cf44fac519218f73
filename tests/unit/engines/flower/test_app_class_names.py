"""An app states the names of the classes, so that all sites number their labels in the same way."""

import numpy as np
import pytest

from fedensemble.config.schema import resolve
from fedensemble.deploy.app_spec import CONFIG, read_app_spec, write_app_spec
from fedensemble.errors import DataError, InputError


@pytest.mark.parametrize(("loss", "outputs"), [("cross_entropy", 2), ("bce", 1)])
def test_sites_number_labels_as_the_app_does(tmp_path, loss, outputs):
    x = np.ones((4, 2), np.float32)
    np.savez(tmp_path / "all.npz", x=x, y=np.array(["no", "yes", "no", "yes"]))
    config = resolve(
        {
            "data": {"source": "npz", "path": str(tmp_path / "all.npz"), "clients": 2},
            "ensemble": {"modes": 1, "clients_per_round": 2},
            "training": {"loss": loss},
        }
    )
    spec = write_app_spec(tmp_path, config)
    assert spec.class_names == ("no", "yes") and spec.model["outputs"] == outputs
    assert spec.build_model("cpu").task == "classification"
    # A site that has only one of the classes gives it the same number.
    data = spec.build_client_data((x[:1], ["yes"]))
    assert data.y.tolist() == [1] and data.classes == 2
    assert spec.build_client_data((x[:1], [0])).class_names == ("no", "yes")
    with pytest.raises(DataError, match="'perhaps'"):
        spec.build_client_data((x[:1], ["perhaps"]))
    text = (tmp_path / CONFIG).read_text()
    (tmp_path / CONFIG).write_text(text.replace('"yes"', '"no"'))
    with pytest.raises(InputError, match=r"config\.toml[\s\S]*'no' twice"):
        read_app_spec(tmp_path)
