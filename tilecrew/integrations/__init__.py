"""Drop-in switches for other libraries. Nothing is patched before `enable()` is called."""
