"""The command `sglang-topp completion`: bash runs its script, and the text of zsh's script is checked."""

import argparse
import subprocess

import pytest
import shtab

from sglang_topp_server.cli import main
from sglang_topp_server.cli.argument_types import completes_paths

COMMANDS = {"serve", "sidecar", "generate", "rollouts", "view", "doctor", "demo", "completion"}


@pytest.fixture
def script(capsys):
    def script(shell):
        assert main.main(["completion", shell]) == 0
        return capsys.readouterr().out

    return script


def completed(script, *words, cwd=None):
    """Return the words that bash offers to complete the last one."""
    program = f"""
{script}
COMP_WORDS=({" ".join(f"'{word}'" for word in words)})
COMP_CWORD={len(words) - 1}
COMP_LINE="${{COMP_WORDS[*]}}" COMP_POINT=${{#COMP_LINE}}
function=$(complete -p sglang-topp | sed 's/.*-F \\([^ ]*\\).*/\\1/')
$function sglang-topp "${{COMP_WORDS[COMP_CWORD]}}" "${{COMP_WORDS[COMP_CWORD-1]}}"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(
        ["bash", "--norc", "-c", program], capture_output=True, text=True, check=True, cwd=cwd
    )
    return {word.strip() for word in done.stdout.splitlines()} - {""}


def test_bash_offers_commands_options_and_choices(script):
    bash = script("bash")
    assert completed(bash, "sglang-topp", "") >= COMMANDS
    assert completed(bash, "sglang-topp", "se") == {"serve"}
    assert completed(bash, "sglang-topp", "generate", "--top-l") == {
        "--top-logprobs-p",
        "--top-logprobs-source",
    }
    assert completed(bash, "sglang-topp", "serve", "--engine-") == {"--engine-host", "--engine-port"}
    assert completed(bash, "sglang-topp", "completion", "z") == {"zsh"}


@pytest.mark.parametrize(
    "words",
    [("view", "run"), ("rollouts", "run"), ("view", "x", "--tokenizer", "run"), ("generate", "--out", "run")],
)
def test_bash_offers_paths(script, tmp_path, words):
    (tmp_path / "run-1.parquet").touch()
    assert completed(script("bash"), "sglang-topp", *words, cwd=tmp_path) == {"run-1.parquet"}


def test_zsh_gets_every_command_with_its_options_and_paths(script):
    zsh = script("zsh")
    assert zsh.startswith("#compdef sglang-topp")
    for command in COMMANDS:
        assert f"    {command}:'" in zsh
    assert '"--top-logprobs-p[' in zsh
    assert ":_files" in zsh


def test_paths_complete_as_shtab_does_it():
    action = argparse.ArgumentParser().add_argument("path")
    completes_paths(action)
    assert action.complete.items() <= shtab.FILE.items()
