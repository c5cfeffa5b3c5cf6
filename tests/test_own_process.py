"""A test process of its own: what it says of failures, skips and hangs."""

import itertools
import subprocess
import sys

import pytest

from tests.own_process import ROOT, run_emulated


def file_of(tmp_path, body):
    path = tmp_path / "some_gpu.py"
    path.write_text(f"import os, sys, time, pytest\n\ndef test_it():\n    {body}\n")
    return path


def test_passes_with_more_queues(tmp_path):
    run_emulated(file_of(tmp_path, "assert os.environ['CUDA_DEVICE_MAX_CONNECTIONS'] == '32'"))


def test_a_failure_is_shown(tmp_path):
    with pytest.raises(AssertionError, match=r"exit code 1\n(.|\n)*assert 6 == 7"):
        run_emulated(file_of(tmp_path, "assert 6 == 7"))


def test_what_a_process_says_that_ends_itself_is_shown(tmp_path):
    with pytest.raises(AssertionError, match=r"exit code 70\n(.|\n)*last words"):
        run_emulated(file_of(tmp_path, "print('last words', file=sys.__stderr__, flush=True); os._exit(70)"))


def test_a_hang_ends(tmp_path):
    with pytest.raises(AssertionError, match=r"exit code none after 5 s\n(.|\n)*test_it"):
        run_emulated(file_of(tmp_path, "time.sleep(60)"), limit_seconds=5)


def test_all_skipped_is_a_skip(tmp_path):
    with pytest.raises(pytest.skip.Exception, match="1 skipped"):
        run_emulated(file_of(tmp_path, "pytest.skip('no GPU')"))


def test_no_tests_is_a_failure(tmp_path):
    path = file_of(tmp_path, "pass")
    path.write_text("")
    with pytest.raises(AssertionError, match="exit code 5"):
        run_emulated(path)


def test_parts_are_the_whole():
    """Every test of the file is in one of six parts, none in two."""
    tests = []
    for number in range(6):
        command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider"]
        command += ["--part", f"{number}/6", "tests/moe/emulated_gpu.py"]
        output = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
        tests.append([line for line in output.splitlines() if "::" in line])
    assert max(map(len, tests)) - min(map(len, tests)) <= 1
    assert len(set(itertools.chain(*tests))) == sum(map(len, tests)) > 150
