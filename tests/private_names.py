"""The private names of other packages that this one needs, and why: a release may move them."""

import ast
from pathlib import Path

NAMES = {
    "_option_string_actions": "jsonargparse's parser has no public list of its options",
    "_batches_that_stepped": "a checkpoint's key: the step of the last row of metrics.csv",
    "_accelerator_connector": "keeps Lightning from putting DistributedSamplers into loaders",
    "_active_loop": "the loop that runs, whose loaders must draw the same in all processes",
    "_utils": "torch.utils.data._utils: pins what a worker has read",
    "_get_iterator": "tells whether a DataLoader makes torch's own iterator",
    "_iterator": "workers that persist, which Lightning shuts down; what a CombinedLoader reads",
    "_data_fetcher": "whether Lightning has read a batch ahead",
    "_data_connector": "whether a module or data module has a hook of its own",
    "_datahook_selector": "the same",
    "_flat_weights": "a second list of a recurrent layer's parameters, for copies of them",
    "_flat_weights_names": "the same",
    "_auto_add_worker_init_fn": "workers are seeded alike in all processes",
    "_combined_loader": "the loaders of a loop",
    "_device": "what SingleDeviceStrategy keeps its device in",
    "_results": "what `self.log` has logged: each shard's batch size, mean over all samples",
    "_collect_rng_states": "random numbers of all generators; Lightning's own use it, too",
    "_set_rng_states": "the same",
    "_timeout": "what DDPStrategy keeps the timeout of its process group in",
    "_reparametrize_module": "torch's functional_call for a whole step, not only for `forward`",
    "_wandb_init": "Lightning passes wandb an argument of which it warns",
    "_foreach_add_": "one kernel for a list of tensors, as torch's optimizers use it",
    "_foreach_copy_": "the same for copies",
    "_version": "counts changes in place: of gradients that are being accumulated",
    "_current_fx_name": "whether a hook of the user runs, which may look at a batch",
    "_mode": "how a CombinedLoader goes through its loaders",
    "_spec": "which part of a batch is of which of its loaders",
    "_IndexBatchSamplerWrapper": "where writers of predictions look for indices",
    "_start_method": "what DDPStrategy keeps the way in which processes start in",
    "_signal_connector": "notes SIGTERM, for the end of a batch",
    "_sigterm_notifier_fn": "Lightning's handler, which broadcasts",
    "_broadcast_sigterm_tensor": "Lightning's look before every batch, which broadcasts",
    "_exit": "os._exit: a process that ends without cleaning up, in a test of its strategy",
}
TRACE_NAMES = {  # of drawing/, which can be deleted
    "_python_dispatch": "documented: where TorchDispatchMode is",
    "_pytree": "documented: finds tensors in the arguments of an operation",
    "_make_wrapper_subclass": "a tensor with a device of its own, and without numbers",
    "_schema": "which arguments an operation changes",
    "_cdata": "the identity of a meta tensor's storage, which has no address",
    "_foreach_": "how the names of operations on lists begin",
}
WORDS = {
    "_acc",
    "_allreduce",
    "_benchmark",
    "_loss",
    "_fields",
    "_replace",
}  # parts of texts; a namedtuple's, documented


def private_names(package: Path) -> set[str]:
    """Names with a leading underscore that the files of a package use, but do not define.

    An overridden method, such as `_configure_launcher`, counts as defined.
    """
    own: set[str] = set()
    used: set[str] = set()
    trees = [ast.parse(path.read_text()) for path in package.rglob("*.py")]
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.Attribute):
            is_own = isinstance(node.ctx, ast.Store) and getattr(node.value, "id", "") == "self"
            (own if is_own else used).add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            used |= {*str(node.module).split("."), *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Constant) and str(node.value).isidentifier():
            used.add(str(node.value))  # for getattr
    return {name for name in used - own if name[:1] == "_" and name[1:2] not in ("", "_")} - WORDS
