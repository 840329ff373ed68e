"""GET /openapi.json: made from the request models, since routes read their bodies themselves."""

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from server.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    TokenizeRequest,
)
from server.versions import version

__all__ = ["document", "routes"]

_POSTS: dict[str, tuple[str, type[BaseModel]]] = {
    "/v1/chat/completions": ("Answer a chat.", ChatRequest),
    "/v1/completions": ("Continue prompts.", CompletionRequest),
    "/v1/responses": ("Answer a chat, in the form of OpenAI's Responses.", ResponsesRequest),
    "/tokenize": ("Text or messages to token ids.", TokenizeRequest),
    "/detokenize": ("Token ids to text.", DetokenizeRequest),
}
_GETS = {
    "/v1/models": "The model, under each of its names.",
    "/v1/models/{name}": "The model by one of its names.",
    "/v1/responses/{name}": "Refused: responses are not stored.",
    "/health": "Whether the engine runs.",
    "/version": "Which Grout this is.",
    "/metrics": "Metrics for Prometheus.",
    "/openapi.json": "This document.",
    "/": "A chat page.",
}

# Parts of requests that the routes check themselves.
_TEXT = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["type", "text"],
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
            },
        },
    ]
}
_NAMED = {"name": {"type": "string"}}
_UNKNOWN = {"type": "null"}
"""Of fields that are unknown: null asks for nothing."""


def _message(roles: list[str], required: list[str], properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["role", *required],
        "properties": {"role": {"enum": roles}, **_NAMED, **properties},
        "additionalProperties": _UNKNOWN,
    }


_OR_NULL = {"type": ["string", "null"]}
_MESSAGE = {
    "anyOf": [
        _message(["developer", "system", "user"], ["content"], {"content": _TEXT}),
        _message(["tool"], ["content", "tool_call_id"],
                 {"content": _TEXT, "tool_call_id": {"type": "string"}}),
        _message(
            ["assistant"],
            [],
            {
                "content": {"anyOf": [*_TEXT["anyOf"], {"type": "null"}]},
                "reasoning_content": _OR_NULL,
                "reasoning": _OR_NULL,
                "refusal": {"type": "null"},
                "tool_calls": {
                    "type": ["array", "null"],
                    "items": {"$ref": "#/components/schemas/ToolCall"},
                },
            },
        ),
    ]
}  # fmt: skip
_TOOL_CALL = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "id": {"type": ["string", "null"]},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string"},
                "arguments": {
                    "type": ["string", "object", "null"],
                    "contentMediaType": "application/json",
                },
            },
        },
    },
}
_PROMPT = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        {
            "type": "array",
            "minItems": 1,
            "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        },
    ]
}
_TOOL_CHOICE = {
    "anyOf": [
        {"enum": ["none", "auto", "required", None]},
        {
            "type": "object",
            "required": ["type", "function"],
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {"name": {"type": "string"}},
                },
            },
        },
    ]
}
_FORMAT = {
    "anyOf": [
        {"type": "null"},
        {
            "type": "object",
            "required": ["type"],
            "properties": {"type": {"enum": ["text", "json_object"]}},
        },
        {
            "type": "object",
            "required": ["type", "json_schema"],
            "properties": {
                "type": {"const": "json_schema"},
                "json_schema": {
                    "type": "object",
                    "required": ["schema"],
                    "properties": {
                        "name": {"type": "string"},
                        "description": {"type": "string"},
                        "strict": {"type": ["boolean", "null"]},
                        "schema": {"type": "object"},
                    },
                    "additionalProperties": False,
                },
            },
        },
    ]
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}


def document() -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the API."""
    schemas: dict[str, Any] = {"Error": _ERROR, "Message": _MESSAGE, "ToolCall": _TOOL_CALL}
    paths: dict[str, Any] = {}
    for path, (summary, model) in _POSTS.items():
        _add_schema(schemas, model)
        body = {"$ref": f"#/components/schemas/{model.__name__}"}
        paths[path] = {
            "post": {
                "summary": summary,
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": body}},
                },
                "responses": _responses(),
            }
        }
    for path, summary in _GETS.items():
        paths[path] = {"get": {"summary": summary, "responses": _responses()}}
        if "{name}" in path:
            paths[path]["get"]["parameters"] = [_NAME]
    paths["/v1/embeddings"] = {
        "post": {
            "summary": "Refused: the models served here generate.",
            "requestBody": {"content": {"application/json": {"schema": {"type": "object"}}}},
            "responses": _responses(),
        }
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Grout", "version": version()},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def routes() -> APIRouter:
    """Return the route."""
    router = APIRouter()

    @router.get("/openapi.json")
    async def get_openapi() -> dict[str, Any]:
        return document()

    return router


def _add_schema(schemas: dict[str, Any], model: type[BaseModel]) -> None:
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    inner = schema.pop("$defs", {})
    for one in (schema, *inner.values()):
        if one.get("additionalProperties") is False:
            one["additionalProperties"] = _UNKNOWN
    schemas |= inner
    properties = schema["properties"]
    if "messages" in properties:
        properties["messages"] = {
            "type": "array",
            "minItems": 1,
            "items": {"$ref": "#/components/schemas/Message"},
        }
    if "prompt" in properties and model is CompletionRequest:
        properties["prompt"] = _PROMPT
    if "response_format" in properties:
        properties["response_format"] = _FORMAT
    if "tool_choice" in properties:
        properties["tool_choice"] = _TOOL_CHOICE
    schemas[model.__name__] = schema


def _responses() -> dict[str, Any]:
    error = {"schema": {"$ref": "#/components/schemas/Error"}}
    return {
        "200": {"description": "As asked; an event stream where `stream` is true."},
        "default": {"description": "Why not.", "content": {"application/json": error}},
    }
