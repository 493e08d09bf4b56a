// SPDX-License-Identifier: Apache-2.0

// Command nothing is a CNI plugin for measurements. ADD of this plugin only prints the prevResult. The additional time of a real plugin is
// the time of the real plugin minus the time of the plugin `nothing`.
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
