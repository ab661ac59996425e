// In a report nobody does anything.
"use strict";

const actionsFor = () => make("td");
const actionsForHost = () => make("td");
