"""The routes, one noun a module; each has `routes(served) -> APIRouter`."""
