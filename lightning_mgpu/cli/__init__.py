"""The command line: Lightning's own LightningCLI with this package's defaults.

| file            | what is in it                                                             |
| --------------- | ------------------------------------------------------------------------- |
| `help.py`       | the table of subcommands; `--help`: the options people use first          |
| `main.py`       | from arguments to a subcommand; messages that are kept out of its output  |
| `arguments.py`  | conveniences that become plain arguments of the LightningCLI              |
| `yaml_files.py` | `--config`: where files are found, and how they are read                  |
| `training_cli.py` | the LightningCLI                                                        |
| `parser.py`     | its parser: a class that is named has its own defaults                    |
| `checks.py`     | secrets, devices, another run: what is wrong before anything starts      |
| `error_messages.py` | a mistake ends in a few lines, with 'did you mean'                    |
| `export.py`     | ONNX and torch's exported program                                         |
"""
