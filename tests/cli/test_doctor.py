from trueup import doctor


def test_the_exit_code_tells_whether_this_machine_can_train(trueup):
    answer = trueup("doctor", "--json")
    checks = answer.json["checks"]
    assert [check["name"] for check in checks] == [check.name for check in doctor.diagnose()]
    ready = all(check["ok"] for check in checks if check["required"])
    assert (answer.json["ok"], answer.code) == (ready, 0 if ready else 1)


def test_a_machine_without_a_sandbox_is_not_ready_and_told_what_to_do(trueup_without_sandbox):
    answer = trueup_without_sandbox("doctor")
    assert answer.code == 1
    assert "✗ sandbox" in answer.out
    assert "install bubblewrap" in answer.out
    assert answer.out.splitlines()[-1] == "not ready: mend what is marked with ✗"


def test_what_training_can_do_without_is_named_and_does_not_fail(trueup, tmp_path, monkeypatch):
    ready = trueup("doctor", "--json").json["ok"]
    monkeypatch.setenv("PATH", str(tmp_path))
    answer = trueup("doctor")
    assert answer.code == (0 if ready else 1)
    assert "! git           not installed\n" in answer.out
    assert "install git" in answer.out
