"""HTTP in processes of its own: `processes` starts them beside the engine, `FrontLink` (engine's
side) and `EngineLink` (worker's side) talk in `messages` over a `channel`, and `app` is what runs in
one."""
