// SPDX-License-Identifier: Apache-2.0

// Command nothing is a CNI plugin for measurements. Its ADD only prints the prevResult. The time of a real plugin
// minus the time of this plugin is the cost of the real plugin.
package main

import (
	"encoding/json"
	"io"
	"os"
)

func main() {
	var conf struct {
		PrevResult json.RawMessage `json:"prevResult"`
	}
	stdin, err := io.ReadAll(os.Stdin)
	if err == nil {
		err = json.Unmarshal(stdin, &conf)
	}
	if err == nil && os.Getenv("CNI_COMMAND") == "ADD" {
		_, err = os.Stdout.Write(conf.PrevResult)
	}
	if err != nil {
		os.Exit(1)
	}
}
