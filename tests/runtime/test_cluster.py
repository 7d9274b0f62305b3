"""The rank of a process in its run: by flags, by the environment, under SLURM, on a TPU pod, or
alone."""

import http.server
import threading

import pytest

from tpu_rl.errors import InputError
from tpu_rl.runtime import cluster
from tpu_rl.runtime.cluster import Member

ALL = ["--coordinator-address", "127.0.0.1:8476", "--num-processes", "4", "--process-id", "2"]
GIVEN = list(zip(ALL[::2], ALL[1::2], strict=True))
SRUN = {
    "SLURM_JOB_ID": "5000",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}


def test_a_process_is_alone_unless_something_says_otherwise():
    assert cluster.find(["arithmetic_grpo", "--steps", "3"], {}) == (
        None,
        ["arithmetic_grpo", "--steps", "3"],
    )


def test_flags_say_it_and_are_taken_from_the_others():
    others = ["arithmetic_grpo", "--steps", "3", "--wandb"]
    expected = (Member("127.0.0.1:8476", 4, 2), others)
    assert cluster.find([*others[:2], *ALL, *others[2:]], {}) == expected
    assert cluster.find([*others, *[f"{flag}={value}" for flag, value in GIVEN]], {}) == expected
    underscored = [f"--{flag[2:].replace('-', '_')}={value}" for flag, value in GIVEN]
    assert cluster.find([*underscored, *others], {}) == expected


def test_the_environment_says_it_where_no_flag_does():
    environment = dict(zip(cluster.FLAGS.values(), ALL[1::2], strict=True))
    assert cluster.find([], environment) == (Member("127.0.0.1:8476", 4, 2), [])
    assert cluster.find(["--process-id", "3"], environment) == (Member("127.0.0.1:8476", 4, 3), [])


def test_one_process_of_one_is_alone():
    assert cluster.find([*ALL[:2], "--num-processes", "1", "--process-id", "0"], {}) == (None, [])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (ALL[:4], "without --process-id"),
        (ALL[2:], "without --coordinator-address"),
        ([*ALL[:4], "--process-id", "4"], "process 4 of 4"),
        ([*ALL[:2], "--num-processes", "0", "--process-id", "0"], "process 0 of 0"),
        ([*ALL[:4], "--process-id", "-1"], "--process-id"),
        ([*ALL[:2], "--num-processes", "two", *ALL[4:]], "'two'"),
        (["--coordinator-address", "127.0.0.1", *ALL[2:]], "not an address"),
        (["--coordinator-address", "127.0.0.1:70000", *ALL[2:]], "not an address"),
        (["--coordinator-address", "no host:8476", *ALL[2:]], "no host"),
        (["--process-id"], "expected one argument"),
    ],
)
def test_what_does_not_fit_together_is_one_message(given, message):
    with pytest.raises(InputError, match=message) as error:
        cluster.find(given, {})
    assert error.value.fix
    assert str(error.value).count("\n") <= 4


def test_a_step_of_slurm_counts_its_own_tasks():
    member, _ = cluster.find([], SRUN | {"SLURM_NTASKS": "99"})
    assert member == Member("localhost:62344", 8, 5, (1,))
    assert cluster.find(["--coordinator-address", "127.0.0.1:1"], SRUN)[0] == Member(
        "127.0.0.1:1", 8, 5, (1,)
    )


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a1", "a1"),
        ("a1,a2", "a1"),
        ("gpu[003-005,9]", "gpu003"),
        ("gpu[7]", "gpu7"),
        ("n[01,03],m2", "n01"),
    ],
)
def test_the_first_host_of_a_step_runs_the_service(nodes, first):
    member = cluster.slurm(SRUN | {"SLURM_STEP_NODELIST": nodes})
    assert member is not None
    assert member.coordinator == f"{first}:62344"


@pytest.mark.parametrize(
    ("environment", "devices"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x8)"}, None),
        ({"SLURM_GPUS_PER_TASK": "1"}, None),
        ({"CUDA_VISIBLE_DEVICES": "3"}, None),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, (1,)),
    ],
)
def test_a_task_takes_one_gpu_where_it_sees_those_of_others(environment, devices):
    member = cluster.slurm(SRUN | environment)
    assert member is not None
    assert member.devices == devices


def test_a_batch_script_is_one_process_whatever_the_job_has():
    assert cluster.slurm({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}) is None
    assert cluster.slurm(SRUN | {"SLURM_STEP_NUM_TASKS": "1"}) is None


# --- TPU pods ---


@pytest.fixture
def tpu_host(tmp_path, monkeypatch):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "accel0").touch()
    monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda name: True)
    return tmp_path


@pytest.fixture
def server():
    """A metadata server; `server.attributes` is what it knows."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.rpartition("/")[2]
            known = name in self.server.attributes and self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200 if known else 404)
            self.end_headers()
            self.wfile.write(self.server.attributes.get(name, "").encode() if known else b"")

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as running:
        running.attributes = {}
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("environment", "several"),
    [
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, True),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, False),
        ({"TPU_PROCESS_ADDRESSES": "a:1,b:1"}, True),
        ({"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"}, True),
        ({"TPU_SKIP_MDS_QUERY": "1"}, False),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "JAX_PLATFORMS": "cpu"}, False),
        ({"GCE_METADATA_IP": "127.0.0.1:9"}, False),
    ],
)
def test_a_pod_is_known_by_its_environment(tpu_host, environment, several):
    assert cluster.on_a_tpu_pod(environment, tpu_host) is several


@pytest.mark.parametrize(
    ("attributes", "several"),
    [
        ({"worker-network-endpoints": "unknown:unknown:10.0.0.2,unknown:unknown:10.0.0.3"}, True),
        ({"worker-network-endpoints": "unknown:unknown:10.0.0.2"}, False),
        (
            {
                "worker-network-endpoints": "10.0.0.2",
                "tpu-env": "ZONE: 'x'\nMEGASCALE_NUM_SLICES: '4'\n",
            },
            True,
        ),
        ({}, False),
    ],
)
def test_a_pod_is_known_by_what_the_cloud_tells(tpu_host, server, attributes, several):
    server.attributes = attributes
    environment = {"GCE_METADATA_IP": f"127.0.0.1:{server.server_address[1]}"}
    assert cluster.on_a_tpu_pod(environment, tpu_host) is several


def test_without_a_tpu_nobody_is_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "metadata", None)
    assert not cluster.on_a_tpu_pod({}, tmp_path)
