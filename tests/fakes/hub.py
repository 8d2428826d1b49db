"""The HF Hub's routes on 127.0.0.1, in memory, for its real clients; faults are injected by the name of a route."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.routing import APIRoute
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tests.fakes.hub_state import USER, Blob, Entry, FakeHub, Repo, authorized, refused

LFS_SUFFIXES = (".parquet", ".safetensors")
REPO = "/api/{kind}/{owner}/{name}"


def faulty_route(hub: FakeHub) -> type[APIRoute]:
    """Routes that log what they receive and fail when told to."""

    class Route(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Any]:
            work = super().get_route_handler()

            async def handle(request: Request) -> Response:
                hub.log.append(Entry(self.name, len(await request.body())))
                fault = hub.next_fault(self.name)
                if fault is None:
                    return await work(request)
                if fault.after:
                    await work(request)
                if fault.do is not None:
                    fault.do()
                if fault.reset:
                    request.scope["transport"].abort()
                    await asyncio.sleep(0)
                elif fault.status is not None:
                    # As careless servers do: the credentials come back in the words of the error.
                    words = f"no luck\n with {request.headers.get('authorization')} at /srv/hub/{self.name}"
                    return Response(json.dumps({"error": words}), fault.status, media_type="application/json")
                elif not fault.after:
                    return await work(request)
                return Response()

            return handle

    return Route


def hub_app(hub: FakeHub) -> FastAPI:
    """The routes that huggingface_hub and datasets call; their names are those that `fail` takes."""
    app = FastAPI()
    for add_routes in (accounts, listings, commits_and_tags, large_files, downloads):
        router = APIRouter(route_class=faulty_route(hub))
        add_routes(router, hub)
        app.include_router(router)
    return app


def writable(hub: FakeHub, request: Request) -> Repo:
    if not authorized(request):
        raise refused(401, "Invalid username or password.")
    return hub.repo(request)


def accounts(router: APIRouter, hub: FakeHub) -> None:
    @router.post("/api/validate-yaml")
    async def validate_yaml() -> Any:
        return {"errors": [], "warnings": []}

    @router.post("/api/repos/create")
    async def create(request: Request) -> Any:
        if not authorized(request):
            raise refused(401, "Invalid username or password.")
        body = await request.json()
        kind, repo_id = body["type"] + "s", f"{body['organization'] or USER}/{body['name']}"
        url = hub.page(kind, repo_id)
        if (kind, repo_id) in hub.repos:
            return Response(json.dumps({"error": "You already created this repo", "url": url}), 409)
        hub.create(kind, repo_id, private=body.get("visibility") == "private")
        return {"url": url}


def listings(router: APIRouter, hub: FakeHub) -> None:
    @router.get(REPO)
    @router.get(REPO + "/revision/{revision:path}")
    async def info(request: Request, kind: str, owner: str, name: str, revision: str = "main") -> Any:
        repo = hub.repo(request)
        commit = repo.at(revision)
        siblings = [{"rfilename": path} for path in commit.files]
        return {
            **{
                "_id": "1",
                "id": repo.renamed or f"{owner}/{name}",
                "author": owner,
                "sha": commit.oid,
                "private": repo.private,
            },
            **{"disabled": False, "gated": False, "downloads": 0, "likes": 0, "tags": [], "siblings": siblings},
        }

    @router.get(REPO + "/tree/{revision}")
    @router.get(REPO + "/tree/{revision}/{path:path}")
    async def tree(request: Request, revision: str, path: str = "", recursive: bool = False) -> Any:
        files = hub.repo(request).at(revision).files
        prefix = f"{path}/" if path else ""
        entries: dict[str, Any] = {}
        for file, blob in files.items():
            if not file.startswith(prefix):
                continue
            parts = file[len(prefix) :].split("/")
            for depth in range(1, len(parts)):
                folder = prefix + "/".join(parts[:depth])
                if recursive or depth == 1:
                    entries[folder] = {"type": "directory", "path": folder, "oid": "0" * 40, "size": 0}
            if recursive or len(parts) == 1:
                entries[file] = blob.listed(file)
        if path and not entries:
            raise refused(404, f"{path} does not exist", "EntryNotFound")
        return list(entries.values())

    @router.get(REPO + "/refs")
    async def refs(request: Request) -> Any:
        repo = hub.repo(request)
        main = {"name": "main", "ref": "refs/heads/main", "targetCommit": repo.commits[-1].oid}
        tags = [
            {"name": tag, "ref": f"refs/tags/{tag}", "targetCommit": hashlib.sha1(tag.encode()).hexdigest()}
            for tag in repo.tags  # annotated: each is an object of its own
        ]
        return {"branches": [main], "converts": [], "tags": tags}


def commits_and_tags(router: APIRouter, hub: FakeHub) -> None:
    @router.post(REPO + "/preupload/{revision}")
    async def preupload(request: Request, revision: str) -> Any:
        there = writable(hub, request).at(revision).files
        files = (await request.json())["files"]
        return {
            "files": [
                {
                    **{"path": path, "uploadMode": "lfs" if path.endswith(LFS_SUFFIXES) else "regular"},
                    **{"shouldIgnore": False, "oid": there[path].oid if path in there else None},
                }
                for path in (file["path"] for file in files)
            ]
        }

    @router.post(REPO + "/commit/{revision}")
    async def commit(request: Request, kind: str, owner: str, name: str, revision: str) -> Any:
        repo = writable(hub, request)
        lines = [json.loads(line) for line in (await request.body()).split(b"\n") if line]
        header, *operations = [(line["key"], line["value"]) for line in lines]
        if header[1].get("parentCommit", repo.commits[-1].oid) != repo.commits[-1].oid:
            raise refused(412, "A commit has happened since. Please refresh and try again.")
        changes: dict[str, Blob | None] = {}
        for key, value in operations:
            path = value["path"]
            if key == "file":
                changes[path] = Blob(base64.b64decode(value["content"]), lfs=False)
            elif key == "lfsFile" and value["oid"] in hub.blobs:
                changes[path] = Blob(hub.blobs[value["oid"]], lfs=True)
            elif key == "deletedFile" and path in repo.commits[-1].files:
                changes[path] = None
            else:
                raise refused(400, f"{key} {path} cannot be committed")
        made = repo.commit(header[1]["summary"], changes)
        url = f"{hub.page(kind, f'{owner}/{name}')}/commit/{made.oid}"
        return {"success": True, "commitUrl": url, "commitOid": made.oid}

    @router.post(REPO + "/tag/{revision}")
    async def tag(request: Request, revision: str) -> Any:
        repo, name = writable(hub, request), (await request.json())["tag"]
        if name in repo.tags:
            raise refused(409, "Tag reference exists already")
        repo.tags[name] = repo.at(revision).oid
        return Response()


def large_files(router: APIRouter, hub: FakeHub) -> None:
    @router.post("/{kind}/{owner}/{name}.git/info/lfs/objects/batch")
    @router.post("/{owner}/{name}.git/info/lfs/objects/batch")
    async def batch(request: Request) -> Any:
        writable(hub, request)
        objects = (await request.json())["objects"]
        actions = {"verify": {"href": f"{hub.url}/verify"}}
        return {
            "transfer": "basic",
            "objects": [
                file
                if file["oid"] in hub.blobs
                else file | {"actions": actions | {"upload": {"href": f"{hub.url}/blobs/{file['oid']}?X-Sign=s3cr3t"}}}
                for file in objects
            ],
        }

    @router.put("/blobs/{oid}")
    async def blob(request: Request, oid: str) -> Any:
        body = await request.body()
        if hashlib.sha256(body).hexdigest() != oid:
            raise refused(400, "the content has another hash")
        hub.blobs[oid] = body
        return Response()

    @router.post("/verify")
    async def verify(request: Request) -> Any:
        asked = await request.json()
        if len(hub.blobs.get(asked["oid"], b"")) != asked["size"]:
            raise refused(404, "no such object")
        return Response()


def downloads(router: APIRouter, hub: FakeHub) -> None:
    @router.api_route("/{kind}/{owner}/{name}/resolve/{revision}/{path:path}", methods=["GET", "HEAD"])
    @router.api_route("/{owner}/{name}/resolve/{revision}/{path:path}", methods=["GET", "HEAD"])
    async def resolve(request: Request, revision: str, path: str) -> Any:
        commit = hub.repo(request).at(revision)
        if path not in commit.files:
            raise refused(404, "Entry not found", "EntryNotFound")
        found = commit.files[path]
        etag = found.sha256 if found.lfs else found.oid
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit.oid, "Accept-Ranges": "bytes"}
        asked = request.headers.get("range", "")
        if not asked:
            return Response(found.content, 200, headers)
        first, _, last = asked.removeprefix("bytes=").partition("-")
        part = found.content[int(first) : int(last) + 1 if last else None]
        headers["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(found.content)}"
        return Response(part, 206, headers)


class Abortable(HttpToolsProtocol):
    """Lets a route cut its connection."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["transport"] = self.transport  # type: ignore[typeddict-unknown-key]


@contextmanager
def serving_hub() -> Iterator[FakeHub]:
    """A Hub in a thread."""
    hub = FakeHub()
    config = uvicorn.Config(hub_app(hub), http=Abortable, lifespan="off", log_config=None, timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        # asyncio sets this only where it made the socket; without it each answer waits 40 ms for a delayed ACK.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hub.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield hub
        finally:
            server.should_exit = True
            thread.join(20)
