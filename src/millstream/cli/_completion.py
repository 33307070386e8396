"""`millstream completion`: what a shell needs to complete commands, options and files."""

import argparse
import dataclasses
import re
from collections.abc import Callable

_DESCRIPTION = """\
Print a script that has a shell complete millstream's commands and options. Put it where the shell
reads it at its start: bash and zsh take it by source in ~/.bashrc and ~/.zshrc, fish as the file
~/.config/fish/completions/millstream.fish.
"""


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of a command.

    Attributes:
        names: How it is written, such as `-o` and `--output`.
        help: What it does.
        takes: Whether a value follows it.
    """

    names: tuple[str, ...]
    help: str
    takes: bool


@dataclasses.dataclass(frozen=True)
class Command:
    """A command: what it is for, its options, and the words that can follow; files, if there are none."""

    name: str
    help: str
    options: tuple[Option, ...]
    words: tuple[str, ...]


def add_arguments(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", make_parser: Callable[[], argparse.ArgumentParser]
) -> None:
    """Describe the command to the parser of the command line."""
    parser = commands.add_parser(
        "completion",
        help="print a script that has a shell complete commands and options",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=list(_SCRIPTS), metavar="SHELL", help=f"one of {', '.join(_SCRIPTS)}")
    parser.set_defaults(run=lambda options: run(options.shell, make_parser()))


def run(shell: str, parser: argparse.ArgumentParser) -> int:
    """Print the script of a shell; returns the exit status."""
    print(_SCRIPTS[shell](commands_in(parser)))
    return 0


def commands_in(parser: argparse.ArgumentParser) -> list[Command]:
    """The commands of a parser."""
    (group,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    helps = {choice.dest: choice.help or "" for choice in group._choices_actions}
    return [_command(name, helps[name], own) for name, own in group.choices.items()]


def _command(name: str, help_text: str, parser: argparse.ArgumentParser) -> Command:
    actions = parser._actions
    options = [
        Option(tuple(action.option_strings), action.help or "", action.nargs != 0)
        for action in actions
        if action.option_strings
    ]
    words = [str(word) for action in actions if not action.option_strings for word in action.choices or ()]
    return Command(name, help_text, tuple(options), tuple(words))


def bash_script(commands: list[Command]) -> str:
    """For bash: words of the first place are commands, words with a dash options, and others files."""
    names = " ".join(command.name for command in commands)
    cases = "\n".join(
        f'        {command.name}) options="{" ".join(n for option in command.options for n in option.names)}"'
        f' words="{" ".join(command.words)}";;'
        for command in commands
    )
    return f"""\
_millstream() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" options="" words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{names} --help --version" -- "$current"))
        return
    fi
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    if [[ "$current" == -* ]]; then
        COMPREPLY=($(compgen -W "$options" -- "$current"))
    elif [ -n "$words" ]; then
        COMPREPLY=($(compgen -W "$words" -- "$current"))
    else
        compopt -o filenames 2>/dev/null
        local IFS=$'\\n'
        COMPREPLY=($(compgen -f -- "$current"))
    fi
}}
complete -F _millstream millstream"""


def zsh_script(commands: list[Command]) -> str:
    """For zsh, with what each option does."""
    named = "\n".join(f"        {_quoted(f'{command.name}:{command.help}')}" for command in commands)
    cases = "\n".join(f"        {command.name}) _arguments {_zsh_arguments(command)};;" for command in commands)
    return f"""\
#compdef millstream
_millstream() {{
    local -a commands
    commands=(
{named}
    )
    if (( CURRENT == 2 )); then
        _describe command commands
        return
    fi
    local command=$words[2]
    shift words
    (( CURRENT-- ))
    case $command in
{cases}
    esac
}}
compdef _millstream millstream"""


def _zsh_arguments(command: Command) -> str:
    specs = [
        name + re.sub(r"([\[\]:])", r"\\\1", option.help).join("[]") + (":value:_files" if option.takes else "")
        for option in command.options
        for name in option.names
    ]
    rest = f"*:word:({' '.join(command.words)})" if command.words else "*:file:_files"
    return " ".join(_quoted(text) for text in [*specs, rest])


def fish_script(commands: list[Command]) -> str:
    """For fish, with what each option does."""
    lines = ["complete -c millstream -n __fish_use_subcommand -f"]
    for command in commands:
        lines.append(f"complete -c millstream -n __fish_use_subcommand -a {command.name} -d {_quoted(command.help)}")
        seen = _quoted(f"__fish_seen_subcommand_from {command.name}")
        for option in command.options:
            names = [f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names]
            needs = " -r" if option.takes else ""
            lines.append(f"complete -c millstream -n {seen} {' '.join(names)}{needs} -d {_quoted(option.help)}")
        if command.words:
            lines.append(f"complete -c millstream -n {seen} -f -a {_quoted(' '.join(command.words))}")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    """A text as one word of a shell, without a quote in it, which every shell writes in another way."""
    return "'" + text.replace("'", "\N{RIGHT SINGLE QUOTATION MARK}") + "'"


_SCRIPTS = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}
